"""Checks a plan's rows of images against a mirror: what a chunk reads is there, and nothing is made twice."""

from collections.abc import Iterator, Mapping, Sequence

from spmd_worker.replica.mirror.records import MirroredGroup, MirroredSequence, reject
from spmd_worker.replica.sequence.metadata import SequenceGroupMetadata
from spmd_worker.replica.sequence.request import Request, RequestId
from spmd_worker.replica.sequence.step import StepPlan


class MediaCheck:
    """One check of one plan, whose rows `PlanCheck` has accepted. `held` names the images whose rows are kept."""

    def __init__(self, plan: StepPlan, groups: Mapping[RequestId, MirroredGroup], held: Mapping[bytes, None]) -> None:
        self._plan, self._groups, self._held = plan, groups, held
        self._sent = {each.request_id: each.request for each in plan.groups if isinstance(each, SequenceGroupMetadata)}

    def check(self, continuing: Sequence[MirroredSequence]) -> dict[bytes, None]:
        """Names of the images whose rows are kept after the step. Raises MirrorError, before anything has changed."""
        plan, held = self._plan, dict(self._held)
        for media_id in plan.drop_rows:
            if media_id not in held:
                reject(self._plan, "drop_rows", media_id.hex(), "an image whose rows are kept")
            del held[media_id]
        for request_id, index, owner in [(each.request_id, each.index, each.owner) for each in plan.encode]:
            request = self._request(RequestId(request_id))
            if request is None or not 0 <= index < len(request.media):
                reject(self._plan, "encode", f"image {index}", "an image of a request that it holds", request_id)
            media_id = request.media[index].media_id
            if media_id in held:
                reject(self._plan, "encode", media_id.hex(), "an image whose rows are not kept yet", request_id)
            if owner < 0:
                reject(self._plan, "encode", f"by rank {owner}", "a rank from 0 on", request_id)
            held[media_id] = None
        for request, first, count in self._chunks(continuing):
            for item in request.media:
                if item.media_id not in held and next(item.rows_between(first, first + count), None):
                    rule = "to read rows that are kept"
                    reject(self._plan, "encode", f"without image {item.media_id.hex()}", rule, request.request_id)
        return held

    def _request(self, request_id: RequestId) -> Request | None:
        group = self._groups.get(request_id)
        return self._sent.get(request_id, None if group is None else group.request)

    def _chunks(self, continuing: Sequence[MirroredSequence]) -> Iterator[tuple[Request, int, int]]:
        """Requests with images, first token and number of tokens that the step computes."""
        for group in self._plan.groups:
            request = self._request(group.request_id)
            if request is not None and request.media:
                for data in group.sequences:
                    yield request, data.num_computed_tokens, data.num_scheduled_tokens
        if 0 in self._plan.continuing_num_ids:
            # One without an id computes its last token again.
            for sequence in continuing:
                yield sequence.request, sequence.num_tokens - 1, 1
