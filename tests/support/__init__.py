"""What tests share: stand-ins, small projects, other users. Fixtures are in the conftest of each folder."""
