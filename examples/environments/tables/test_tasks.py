"""Tasks and scores of `tables` without a world: SQLite takes the place of Postgres.

    cd examples/environments && python3 -m unittest tables.test_tasks
"""

import random
import unittest

from splits import distinct, draw, split_of
from tables import tasks


class Tables(unittest.TestCase):
    def setUp(self) -> None:
        self.tasks = distinct(draw("train", 1, tasks.make), 100)

    def test_a_solution_scores_1_and_every_careless_demonstration_0(self) -> None:
        for number, task in enumerate(self.tasks):
            for care, expected in [(1.0, 1.0), (0.0, 0.0)]:
                [[asked, said]] = tasks.demonstration(task, random.Random(number), care)
                self.assertEqual(asked["content"], task["prompt"])
                self.assertEqual(tasks.score(task["answer"], said["content"], tasks.sqlite()), expected, said)

    def test_tasks_ask_every_kind_of_question_and_keep_to_their_split(self) -> None:
        self.assertTrue(all(split_of(task["prompt"]) == "train" for task in self.tasks))
        verbs = {task["answer"].split(" ")[0] for task in self.tasks}
        self.assertEqual(verbs, {"select", "update", "delete", "insert"})
        self.assertEqual(self.tasks, distinct(draw("train", 1, tasks.make), 100))

    def test_a_right_result_does_not_excuse_what_is_left_in_the_tables(self) -> None:
        question = next(task["answer"] for task in self.tasks if task["answer"].startswith("select sum"))
        sql = tasks.sqlite()

        def also_deletes(query: str) -> str | None:
            printed = sql(query)
            sql("delete from sale where city = 'Rome'")
            return printed

        self.assertEqual(tasks.score(question, question, tasks.sqlite()), 1.0)
        self.assertEqual(tasks.score(question, question, also_deletes), 0.0)

    def test_what_fails_breaks_the_tables_or_does_nothing_scores_0(self) -> None:
        for task in self.tasks:
            for reply in ["", "drop table item", "drop table sale", "select", "select 1", f"-- {task['answer']}"]:
                self.assertEqual(tasks.score(task["answer"], reply, tasks.sqlite()), 0.0, (task, reply))

    def test_an_error_of_the_world_is_no_score(self) -> None:
        def lost(_: str) -> str | None:
            raise RuntimeError("the world is lost")

        with self.assertRaises(RuntimeError):
            tasks.score(self.tasks[0]["answer"], "select 1", lost)


if __name__ == "__main__":
    unittest.main()
