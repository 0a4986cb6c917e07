"""The real thing: an embedded Kubernetes, the demo and the end-to-end suite."""
