"""What moves bytes: the port, the real NIXL agent, and a shipped test double with faults."""
