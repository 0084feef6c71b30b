"""The documents that commands print as JSON, reports embed and pages send: their keys and types, in one place.

They are typed dictionaries because the JSON is the public form: what stands here is what `--format json` prints.
`cli.printing.print_json` writes them, and docs/reference/runs.md lists their keys.
"""
