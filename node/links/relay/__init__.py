"""Links through a server that carries bytes for two members."""
