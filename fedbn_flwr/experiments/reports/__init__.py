"""Reports: finished and running results as one page with tables and pictures."""
