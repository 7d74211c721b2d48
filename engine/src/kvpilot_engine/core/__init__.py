"""The pure core: plain data in, plain data out. Standard library only; no torch, HTTP, clock or logging."""
