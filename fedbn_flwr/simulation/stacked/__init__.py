"""Train several clients at once, their models stacked along a dimension."""
