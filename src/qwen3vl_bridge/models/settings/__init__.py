"""A provider's fields, the tables of refused values by subject, and which fields of a saved provider are used."""
