"""Which worker gets a generation, and the link that carries it there."""
