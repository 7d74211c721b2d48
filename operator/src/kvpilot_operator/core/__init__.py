"""The pure core: facts in, decisions and manifests out. Standard library only; no kopf, client or clock."""
