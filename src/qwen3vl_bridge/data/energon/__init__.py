"""WebDatasets, read by energon: records, task encoder, streams, dataset provider."""
