"""In what order do stages work? The search over one pipeline's orders, with bounds."""
