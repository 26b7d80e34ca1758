"""The embedded API server: SQLite store, kinds, patches, watches, tables, discovery."""
