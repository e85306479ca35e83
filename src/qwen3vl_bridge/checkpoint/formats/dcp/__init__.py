"""torch.distributed.checkpoint folders: metadata, items, reader, writer."""
