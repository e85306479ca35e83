"""Sources of conversations: JSON, Parquet, tables, the hub; splits and fingerprints."""
