"""What listeners of all processes share below HTTP: certificates."""
