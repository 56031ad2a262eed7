"""Failed assertions of the harness show their values, as those of tests do."""

import pytest


pytest.register_assert_rewrite(f"{__package__}.harness")
