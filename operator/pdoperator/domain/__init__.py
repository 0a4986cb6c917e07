"""Pure decisions: from a spec and an observation to actions and a status. No I/O, no clock of its own."""
