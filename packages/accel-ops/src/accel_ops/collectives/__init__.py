"""What processes do together with nested data and objects."""
