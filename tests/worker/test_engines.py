"""What loading a real engine sets up before torch comes in."""

import subprocess
import sys


def test_the_order_of_sums_is_chosen_before_torch_would_warn_of_it(tmp_path):
    """Chosen later, torch warns from C++ on stderr, where no filter of Python's warnings sees it."""
    program = (
        "from d3serve.errors import D3ServeError; from d3serve.settings import Settings\n"
        "from d3serve.worker.engines import load_engine\n"
        f"try: load_engine(Settings(model={str(tmp_path)!r}))\n"
        "except D3ServeError: pass\n"
        "import torch; from d3serve.kernels.matrix import sum_rows_alike; sum_rows_alike()\n"
        "print(torch.backends.cuda.preferred_blas_library().name)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("Cublaslt\n", "")
