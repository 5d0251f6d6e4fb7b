"""Moving frames between agents: one contract, several channels."""
