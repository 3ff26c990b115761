"""The current task in shared memory."""

from __future__ import annotations

import tempfile

from ft_service.data.current_task import CurrentTask, Task


def test_another_mapping_of_the_file_sees_the_tasks_that_run() -> None:
    with tempfile.TemporaryFile() as file:
        reader = CurrentTask.create(file.fileno())
        writer = CurrentTask(file.fileno())
        assert not reader.is_ready
        writer.ready()
        assert reader.is_ready
        assert reader.running() == []
        with writer.at(Task.RENDERING, 3, 3), writer.at(Task.ENCODING, 1, 2):
            found = [(running.task, running.first, running.last) for running in reader.running()]
            assert found == [(Task.RENDERING, 3, 3), (Task.ENCODING, 1, 2)]
            assert all(running.seconds >= 0 for running in reader.running())
        assert reader.running() == []
