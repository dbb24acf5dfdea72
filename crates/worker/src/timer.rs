//! Waiting for an instant that may not be there.

/// Resolves at an instant; never without one.
pub(crate) async fn until(instant: Option<tokio::time::Instant>) {
    match instant {
        Some(instant) => tokio::time::sleep_until(instant).await,
        None => std::future::pending().await,
    }
}
