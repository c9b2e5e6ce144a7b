"""The store: SQLite for one machine, PostgreSQL for a fleet. Schema, and the queries on it, by noun."""
