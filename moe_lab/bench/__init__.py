"""Fair measurements, on ranks: functions that :func:`moe_lab.launch.run` can run. Lesson by lesson.

``data_parallel``: time, bytes and memory of a step for ways of sharing it out (lesson 04_data_parallel).
"""
