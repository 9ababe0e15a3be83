"""Property tests run without deadlines: the machines that run them may be busy."""

from hypothesis import settings

settings.register_profile("patient", settings(), deadline=None)
settings.load_profile("patient")
