//! How an API tells its clients of an error, before an answer and in the middle of it.

use crate::errors::ApiError;
use axum::response::{IntoResponse, Response};

/// Whose API a route belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialect {
    /// OpenAI's chats, whose streams begin with a piece that only says who speaks.
    Chat,
    /// Anthropic's messages.
    Messages,
    /// Everything else is as OpenAI has it.
    Other,
}

impl Dialect {
    pub(super) fn of(path: &str) -> Self {
        match path {
            "/v1/chat/completions" => Self::Chat,
            "/v1/messages" | "/v1/messages/count_tokens" => Self::Messages,
            _ => Self::Other,
        }
    }

    pub(super) fn error_response(self, error: ApiError) -> Response {
        match self {
            Self::Messages => error.into_anthropic_response(),
            Self::Chat | Self::Other => error.into_response(),
        }
    }

    /// The event with which a stream ends that cannot be finished.
    pub(super) fn error_event(self, error: &ApiError) -> String {
        match self {
            Self::Messages => format!("event: error\ndata: {}\n\n", error.anthropic_json()),
            Self::Chat | Self::Other => format!("data: {}\n\n", error.json()),
        }
    }

    /// Tokens in so many pieces of a stream.
    pub(super) fn tokens_in(self, pieces: u64) -> u64 {
        match self {
            Self::Chat => pieces.saturating_sub(1),
            Self::Messages | Self::Other => pieces,
        }
    }
}
