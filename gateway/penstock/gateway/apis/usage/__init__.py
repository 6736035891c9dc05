"""Usage of each key, by day and model: kept in the database, shown to operators."""
