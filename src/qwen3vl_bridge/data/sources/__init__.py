"""Sources of conversations: JSON, Parquet, tables, the hub; splits and fingerprints."""

HUB = "hf://"  # prefix of paths of data sets on the hub
