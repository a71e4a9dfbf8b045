"""A call: its fields, its record, its request to an operator, and its operators in the graphs of PyTorch."""
