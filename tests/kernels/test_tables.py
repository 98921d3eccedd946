"""Tables of a pass cross to the device together and arrive as they were."""

import numpy as np
import torch

from d3serve.kernels.tables import LINE_BYTES, upload


def test_tables_arrive_as_they_were_each_on_a_line_of_its_own():
    tables = (
        np.arange(5),
        np.arange(12).reshape(3, 4),
        np.empty((0, 2), dtype=np.int64),
        np.array([True, False]),
    )
    whole, views = upload(tables, torch.int64, "cpu")
    for table, view in zip(tables, views, strict=True):
        assert view.shape == table.shape
        assert view.tolist() == table.tolist()
        assert view.dtype == torch.int64
        assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr(), "one copy"
        assert view.storage_offset() * view.element_size() % LINE_BYTES == 0


def test_a_table_is_filled_up_to_the_shape_that_is_asked_for():
    _, (first, second) = upload(
        (np.array([[1, 2]]), np.array([3])), torch.int32, "cpu", shapes=((3, 2), (2,))
    )
    assert first.tolist() == [[1, 2], [0, 0], [0, 0]]
    assert second.tolist() == [3, 0]
