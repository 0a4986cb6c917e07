"""An embedded Kubernetes for end-to-end tests: the real programs, no container engine."""
