"""Where the arithmetic happens: which device the owner lends, what it holds, and how tensors come and go."""
