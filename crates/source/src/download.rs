//! One file from a server into the store's own place for unfinished files: it goes on where an earlier attempt stopped,
//! and what comes is hashed while it is written.

use crate::{
    error::FetchError,
    http::{Http, check_status},
    s3::Object,
    settings::Settings,
    sink::Sink,
};
use http_body_util::BodyExt;
use hyper::{
    Response, StatusCode,
    body::Incoming,
    header::{
        CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, ETAG, HeaderMap, HeaderName, HeaderValue, IF_RANGE,
        LAST_MODIFIED, RANGE,
    },
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use url::Url;
use warmset_core::Digest;
use warmset_store::{Origin, Staging, Store, StoreError};

/// Attempts that bring nothing new, in a row, before it is given up.
const FRUITLESS_ATTEMPTS_MAX: u32 = 5;
/// How long another fetch of the same file may take to end, and how often that is looked at.
const STAGE_PATIENCE: Duration = Duration::from_secs(2);
const STAGE_PAUSE: Duration = Duration::from_millis(20);
/// The longest pause between two attempts.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// Hears `(done_bytes, total_bytes)`; the total is 0 while nobody knows it.
pub type Progress<'a> = &'a mut (dyn FnMut(u64, u64) + Send);

/// Where to ask for a file.
pub(crate) enum Address {
    /// Always the same.
    Fixed { url: Url, secret: Option<HeaderValue> },
    /// Signed anew for each attempt, as signatures age.
    Signed(Box<Object>),
}

/// One file on a server.
pub(crate) struct Remote {
    /// As it is shown.
    pub(crate) location: String,
    /// What its unfinished bytes are kept under.
    pub(crate) key: String,
    pub(crate) address: Address,
    /// What its bytes must be, where somebody who should know says so.
    pub(crate) sha256: Option<Digest>,
    pub(crate) size_bytes: Option<u64>,
}

/// A complete file that is not in the store yet, and its hash.
pub(crate) struct Downloaded {
    pub(crate) staging: Staging,
    pub(crate) sha256: Digest,
}

/// Fetches a file.
pub(crate) async fn download(
    http: &Http,
    store: &Arc<Store>,
    settings: &Settings,
    remote: &Remote,
    progress: Progress<'_>,
) -> Result<Downloaded, FetchError> {
    let staging = stage(store, &remote.key).await?;
    let mut download = Download { http, settings, remote, sink: Sink::new(staging), resumed: false };
    let limit = settings.timeout;
    let done = tokio::time::timeout(limit, download.run(progress)).await;
    let too_long = || FetchError::TooLong { location: remote.location.clone(), seconds: limit.as_secs() };
    let sha256 = done.map_err(|_| too_long())??;
    Ok(Downloaded { staging: download.sink.into_staging()?, sha256 })
}

/// Opens the place for a file. A fetch that was just given up may still be writing what it had.
async fn stage(store: &Arc<Store>, key: &str) -> Result<Staging, FetchError> {
    let began = Instant::now();
    loop {
        let (store, key) = (store.clone(), key.to_owned());
        match blocking(move || store.stage(&key)).await? {
            Err(StoreError::BeingFetched) if began.elapsed() < STAGE_PATIENCE => {
                tokio::time::sleep(STAGE_PAUSE).await;
            }
            staged => return Ok(staged?),
        }
    }
}

/// Runs something that blocks.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, FetchError> {
    tokio::task::spawn_blocking(work).await.map_err(|error| FetchError::Local(format!("a task ended: {error}")))
}

struct Download<'a> {
    http: &'a Http,
    settings: &'a Settings,
    remote: &'a Remote,
    sink: Sink,
    /// Whether any byte of it comes from before this attempt.
    resumed: bool,
}

impl Download<'_> {
    async fn run(&mut self, progress: Progress<'_>) -> Result<Digest, FetchError> {
        let (mut fruitless, mut began_anew) = (0, false);
        loop {
            let before = self.sink.length()?;
            let attempt = self.attempt(&mut *progress).await;
            let found = match attempt {
                Ok(()) => self.sink.digest()?,
                Err(error) if !is_transient(&error) => return Err(error),
                Err(error) => {
                    // What came, however little, is there for the next attempt.
                    fruitless = if self.sink.length()? > before { 0 } else { fruitless + 1 };
                    if fruitless >= FRUITLESS_ATTEMPTS_MAX {
                        return Err(error);
                    }
                    tracing::info!(source = %self.remote.location, "trying again: {error}");
                    tokio::time::sleep(pause(self.settings.retry_pause, fruitless)).await;
                    continue;
                }
            };
            let expected = self.remote.sha256.unwrap_or(found);
            if found == expected {
                return Ok(found);
            }
            let again = self.resumed && !began_anew;
            self.sink.restart()?;
            if !again {
                return Err(FetchError::Mismatch { location: self.remote.location.clone(), expected, found });
            }
            // What was here before may be at fault, not what came now.
            (began_anew, self.resumed) = (true, false);
        }
    }

    /// Asks once, for all or for the rest, and takes what comes.
    async fn attempt(&mut self, progress: Progress<'_>) -> Result<(), FetchError> {
        let mut from = self.sink.ready().await?;
        let mut headers = HeaderMap::new();
        if from > 0 {
            match self.rest(from) {
                Some(rest) => headers = rest,
                None => {
                    self.sink.restart()?;
                    from = 0;
                }
            }
        }
        let (url, answer) = self.ask(&headers).await?;
        let status = answer.status();
        let offer = match status {
            StatusCode::RANGE_NOT_SATISFIABLE if from > 0 => {
                if self.is_complete(from, answer.headers()) {
                    return Ok(());
                }
                self.sink.restart()?;
                return Err(self.broken("what is here is more than it has"));
            }
            StatusCode::PARTIAL_CONTENT if from > 0 => Offer::rest(answer.headers(), from),
            StatusCode::OK => Offer::whole(answer.headers()),
            _ => {
                check_status(&url, status)?;
                Err(format!("it answers with status {status}, which was not asked for"))
            }
        };
        let offer = offer.map_err(|reason| self.lies(reason))?;
        self.check(&offer)?;
        if offer.from == 0 {
            self.sink.restart()?;
            self.sink.remember(offer.origin.clone())?;
        } else if self.sink.origin().is_some_and(|known| !is_same(known, &offer.origin)) {
            self.sink.restart()?;
            return Err(self.broken("it has changed since"));
        }
        self.resumed |= offer.from > 0;
        if let Some(size_bytes) = offer.origin.size_bytes {
            self.sink.reserve(size_bytes)?;
        }
        self.take(answer.into_body(), &offer, progress).await
    }

    async fn ask(&self, headers: &HeaderMap) -> Result<(Url, Response<Incoming>), FetchError> {
        let (url, secret) = match &self.remote.address {
            Address::Fixed { url, secret } => (url.clone(), secret.as_ref()),
            Address::Signed(object) => (object.signed_url().await?, None),
        };
        let answer = self.http.get(&url, headers, secret).await?;
        Ok((url, answer))
    }

    /// The headers that ask for the rest of the same file; none if there is no telling whether it is the same.
    fn rest(&self, from: u64) -> Option<HeaderMap> {
        let known = self.sink.origin()?;
        let verified = self.remote.sha256.is_some();
        if !verified && !self.sink.is_whole() {
            return None;
        }
        let mut headers = HeaderMap::from_iter([(RANGE, HeaderValue::from_str(&format!("bytes={from}-")).ok()?)]);
        // Only a strong tag tells that every byte is the same.
        let strong = known.entity_tag.as_ref().filter(|tag| !tag.starts_with("W/"));
        match strong.or(known.last_modified.as_ref()) {
            Some(validator) => drop(headers.insert(IF_RANGE, HeaderValue::from_str(validator).ok()?)),
            None if verified => {}
            None => return None,
        }
        Some(headers)
    }

    /// Whether the answer that there is nothing behind `from` means that all of it is here.
    fn is_complete(&self, from: u64, headers: &HeaderMap) -> bool {
        let total = text(headers, &CONTENT_RANGE).and_then(|range| range.strip_prefix("bytes */")?.parse().ok());
        total == Some(from) && self.sink.origin().is_some_and(|known| known.size_bytes == Some(from))
    }

    /// Refuses what is too large, or not as large as it should be.
    fn check(&self, offer: &Offer) -> Result<(), FetchError> {
        let Some(size_bytes) = offer.origin.size_bytes else { return Ok(()) };
        self.within_limit(size_bytes)?;
        match self.remote.size_bytes {
            Some(expected) if expected != size_bytes => {
                Err(self.lies(format!("it sends {size_bytes} bytes of a file that has {expected}")))
            }
            _ => Ok(()),
        }
    }

    fn within_limit(&self, size_bytes: u64) -> Result<(), FetchError> {
        let limit_bytes = self.settings.max_bytes;
        if size_bytes > limit_bytes {
            return Err(FetchError::TooLarge { location: self.remote.location.clone(), size_bytes, limit_bytes });
        }
        Ok(())
    }

    /// Takes a body to its end.
    async fn take(&mut self, mut body: Incoming, offer: &Offer, progress: Progress<'_>) -> Result<(), FetchError> {
        let total = offer.origin.size_bytes;
        let mut done = offer.from;
        let mut flow = self.sink.open()?;
        let began = Instant::now();
        progress(done, total.unwrap_or(0));
        let ended = loop {
            let frame = match tokio::time::timeout(self.settings.stall_timeout, body.frame()).await {
                Ok(Some(Ok(frame))) => frame,
                Ok(None) => break Ok(()),
                Ok(Some(Err(error))) => break Err(self.broken(&deepest(&error))),
                Err(_) => break Err(self.broken(&format!("nothing came for {:?}", self.settings.stall_timeout))),
            };
            let Ok(bytes) = frame.into_data() else { continue };
            done += bytes.len() as u64;
            if let Err(error) = self.within_limit(done) {
                break Err(error);
            }
            if total.is_some_and(|total| done > total) {
                break Err(self.lies("it sends more than it announced".to_owned()));
            }
            if !flow.put(bytes).await {
                break Ok(());
            }
            progress(done, total.unwrap_or(0));
        };
        let written = self.sink.close(flow).await;
        // A full disk is the reason, whatever the connection does then.
        written?;
        ended?;
        tracing::debug!(source = %self.remote.location, seconds = began.elapsed().as_secs_f64(), "a body has ended");
        match total {
            Some(total) if done < total => Err(self.broken("it ended early")),
            _ => Ok(()),
        }
    }

    fn broken(&self, reason: &str) -> FetchError {
        FetchError::Broken { location: self.remote.location.clone(), reason: reason.to_owned() }
    }

    fn lies(&self, reason: String) -> FetchError {
        FetchError::Lies { location: self.remote.location.clone(), reason }
    }
}

/// What an answer brings.
struct Offer {
    /// Where its bytes begin.
    from: u64,
    /// Of what they are.
    origin: Origin,
}

impl Offer {
    fn whole(headers: &HeaderMap) -> Result<Self, String> {
        let size_bytes = match text(headers, &CONTENT_LENGTH) {
            Some(length) => Some(length.parse().map_err(|_| "its length is no number".to_owned())?),
            None => None,
        };
        Self::new(headers, 0, size_bytes)
    }

    fn rest(headers: &HeaderMap, from: u64) -> Result<Self, String> {
        let range = text(headers, &CONTENT_RANGE).ok_or("it sends a part and does not say which")?;
        let read = || {
            let (span, total) = range.strip_prefix("bytes ")?.split_once('/')?;
            let (begin, end) = span.split_once('-')?;
            Some((begin.parse::<u64>().ok()?, end.parse::<u64>().ok()?, total.parse::<u64>().ok()?))
        };
        let (begin, end, total) = read().ok_or("it sends a part and does not say which")?;
        if begin != from || end < begin || end.checked_add(1) != Some(total) {
            return Err(format!("it sends bytes {begin} to {end} of {total} and was asked for those from {from} on"));
        }
        Self::new(headers, from, Some(total))
    }

    fn new(headers: &HeaderMap, from: u64, size_bytes: Option<u64>) -> Result<Self, String> {
        if text(headers, &CONTENT_ENCODING).is_some_and(|encoding| encoding != "identity") {
            return Err("it sends the file in a packed form, which was not asked for".to_owned());
        }
        let owned = |name| text(headers, name).map(str::to_owned);
        let origin =
            Origin { entity_tag: owned(&ETAG), last_modified: owned(&LAST_MODIFIED), size_bytes, ..Origin::default() };
        Ok(Self { from, origin })
    }
}

/// Whether the rest that comes now belongs to what came before.
fn is_same(known: &Origin, now: &Origin) -> bool {
    let agree = |known: &Option<String>, now: &Option<String>| known.is_none() || now.is_none() || known == now;
    known.size_bytes.is_none_or(|size_bytes| Some(size_bytes) == now.size_bytes)
        && agree(&known.entity_tag, &now.entity_tag)
        && agree(&known.last_modified, &now.last_modified)
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

fn deepest(error: &dyn std::error::Error) -> String {
    let mut deepest = error;
    while let Some(source) = deepest.source() {
        deepest = source;
    }
    deepest.to_string()
}

fn pause(first: Duration, attempts: u32) -> Duration {
    first.saturating_mul(1 << attempts.saturating_sub(1).min(16)).min(PAUSE_MAX)
}

/// Whether it may go better the next time.
fn is_transient(error: &FetchError) -> bool {
    match error {
        FetchError::Broken { .. } => true,
        FetchError::Status { status, .. } => matches!(status, 408 | 429 | 500 | 502 | 503 | 504),
        _ => false,
    }
}
