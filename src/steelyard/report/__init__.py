"""Reading results: figures, tables and summaries of a run."""
