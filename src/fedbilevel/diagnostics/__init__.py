"""Whether a problem is well posed, and which settings suit it: `fb.check`."""
