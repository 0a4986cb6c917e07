"""Puts pdtransfer beside an engine whose image does not have it: `python -m pdtransfer.install TARGET`.

Run by an init container of the transfer image; TARGET lies in a volume that the engine's container mounts. The engine
is then started with TARGET/pdtransfer_launch.py. Standard library only.
"""
