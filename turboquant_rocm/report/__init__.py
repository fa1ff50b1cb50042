"""Reports about plans: documents of plain values, and what turns them into tables, Markdown and HTML."""
