"""Tools the demo and the end-to-end suite share: kubectl, installation, requests, a run to compare with."""
