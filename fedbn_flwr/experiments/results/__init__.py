"""Results: a row for every run, tables of rows, pictures, and a paper's numbers beside them."""
