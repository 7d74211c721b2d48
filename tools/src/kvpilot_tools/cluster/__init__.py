"""The local cluster: a real Kubernetes on one Linux machine, from binaries that are found or built from Go modules.

`kvpilot-cluster up` gives a whole cluster with a node, `up --api-only` and `api_server()` an API server without one.
"""
