"""MediaError: why an image or audio cannot be used."""

from spmd_worker.base.picklable_error import PicklableError


class MediaError(PicklableError, ValueError):
    """An image, a prompt with images, or audio that cannot be used: the message says what to change, `code` is that
    of an error row. Codes: image_unreadable, image_too_large, image_too_narrow, image_missing, image_outside_root,
    images_unsupported, too_many_images, image_too_long, videos_unsupported, video_missing, video_outside_root,
    video_unreadable, video_too_large, video_too_short, video_too_long, too_many_videos, reserved_token,
    placeholder_mismatch, audio_unreadable, audio_too_large, audio_too_long, audio_empty, audio_missing,
    audio_outside_root, audio_unsupported, extra_missing.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
