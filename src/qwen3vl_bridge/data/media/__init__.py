"""Images and videos: downloading, what was downloaded, decoding."""
