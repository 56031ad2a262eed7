"""The C++ completion marks and queue, and what takes their place without them."""
