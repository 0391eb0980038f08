"""What every store must do, and what each one does on top."""

import pytest

pytest.register_assert_rewrite(f"{__name__}.store_contract")
