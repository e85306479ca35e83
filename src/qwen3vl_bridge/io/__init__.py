"""Reading and writing files, for all packages."""
