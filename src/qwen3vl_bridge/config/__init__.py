"""The configuration of a model: reading `config.json`, the provider's fields, their validation, released sizes."""
