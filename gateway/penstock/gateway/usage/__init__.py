"""What each key has used, by day and model: kept in the database, shown to operators."""
