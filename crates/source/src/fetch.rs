//! Brings the files of a model here, from wherever they are.

use crate::{
    address::Trust,
    download::{Address, Progress, Remote, download},
    environment::Environment,
    error::FetchError,
    http::{Http, trusted},
    hub,
    location::{HubFile, Location},
    ollama,
    s3::Bucket,
    settings::Settings,
};
use rustls::ClientConfig;
use std::{
    path::PathBuf,
    sync::{Arc, OnceLock},
    time::Instant,
};
use url::Url;
use warmset_core::Digest;
use warmset_store::{Staging, Store};

/// One file of a model, ready to be taken into the store.
#[derive(Debug)]
pub enum Part {
    /// On this machine, to be copied.
    Local {
        /// Where it is.
        path: PathBuf,
        /// What its bytes must be, where that is known.
        sha256: Option<Digest>,
    },
    /// Fetched and hashed.
    Fetched {
        /// The file.
        staging: Staging,
        /// Its hash.
        sha256: Digest,
    },
}

/// All files of a model, the first one first.
#[derive(Debug, Default)]
pub struct Gathered {
    /// The files.
    pub parts: Vec<Part>,
    /// The source as it will always mean the same files, where the one that was given may not.
    pub pinned: Option<String>,
    /// How long the transfer took; none if nothing was transferred.
    pub fetch_seconds: Option<f64>,
}

/// Fetches files.
pub struct Fetcher {
    settings: Settings,
    environment: Environment,
    /// Made for the first transfer: who needs none should not pay for it.
    tls: OnceLock<Arc<ClientConfig>>,
}

impl Fetcher {
    /// A fetcher within these limits.
    pub fn new(settings: Settings, environment: Environment) -> Self {
        Self { settings, environment, tls: OnceLock::new() }
    }

    /// Brings all files of a model here. `split` says whether its name may mean several.
    pub async fn gather(
        &self,
        location: &Location,
        split: bool,
        trust: Trust,
        store: &Arc<Store>,
        progress: Progress<'_>,
    ) -> Result<Gathered, FetchError> {
        let parts = if split { location.parts()? } else { vec![location.clone()] };
        match location {
            Location::File(_) => {
                let paths = parts.iter().filter_map(Location::path).cloned();
                let parts = paths.map(|path| Part::Local { path, sha256: None }).collect();
                Ok(Gathered { parts, pinned: None, fetch_seconds: None })
            }
            Location::Https(first) => {
                let http = self.http(trust, first)?;
                let remotes = parts.iter().filter_map(https_remote).collect::<Vec<_>>();
                self.fetch_all(&http, store, &remotes, progress).await
            }
            Location::Hub(_) => {
                let files = parts.into_iter().filter_map(|part| match part {
                    Location::Hub(file) => Some(file),
                    _ => None,
                });
                self.gather_from_hub(trust, files.collect(), store, progress).await
            }
            Location::S3 { bucket, .. } => {
                let bucket = Bucket::open(bucket, self.tls()?)?;
                let remotes =
                    parts.iter().filter_map(|part| s3_remote(&bucket, part)).collect::<Result<Vec<_>, _>>()?;
                // The endpoint is this machine's own setting; nobody who names a key can choose it.
                let http = self.http(Trust::Operator, &bucket.endpoint().await?)?;
                self.fetch_all(&http, store, &remotes, progress).await
            }
            Location::Ollama(name) => {
                let parts = ollama::files(&self.environment.ollama_models, name)?;
                Ok(Gathered { parts, pinned: None, fetch_seconds: None })
            }
        }
    }

    /// Asks the hub what the revision is, then takes what Hugging Face's tools have of it, or fetches it.
    async fn gather_from_hub(
        &self,
        trust: Trust,
        files: Vec<HubFile>,
        store: &Arc<Store>,
        progress: Progress<'_>,
    ) -> Result<Gathered, FetchError> {
        let environment = &self.environment;
        let hub = environment.hub().map_err(FetchError::Local)?;
        let http = self.hub_http(trust, &hub)?;
        let cache = environment.hub_cache.as_deref();
        let in_cache = || cache.and_then(|cache| hub::resolve_in_cache(cache, &files));
        let resolved = if environment.hub_offline {
            let missing = "HF_HUB_OFFLINE is set and the file is not in the Hugging Face cache of this machine";
            in_cache().ok_or_else(|| FetchError::Local(missing.to_owned()))?
        } else {
            match hub::resolve(&http, environment, &hub, &files).await {
                Ok(resolved) => resolved,
                Err(error @ FetchError::Broken { .. }) => match in_cache() {
                    Some(resolved) => {
                        tracing::warn!(commit = %resolved.commit, "taken from the Hugging Face cache: {error}");
                        resolved
                    }
                    None => return Err(error),
                },
                Err(error) => return Err(error),
            }
        };
        let cached: Option<Vec<_>> =
            cache.and_then(|cache| resolved.parts.iter().map(|part| part.cached(cache, &resolved.commit)).collect());
        let pinned = resolved.pinned();
        if let Some(cached) = cached {
            let parts = cached.into_iter().map(|(path, sha256)| Part::Local { path, sha256 }).collect();
            return Ok(Gathered { parts, pinned, fetch_seconds: None });
        }
        let remote = |part: &hub::HubPart| part.remote(environment, &hub, &resolved.commit);
        let remotes: Vec<Remote> = resolved.parts.iter().map(remote).collect();
        Ok(Gathered { pinned, ..self.fetch_all(&http, store, &remotes, progress).await? })
    }

    /// The hub is this machine's own setting; where it redirects to is not.
    fn hub_http(&self, trust: Trust, hub: &Url) -> Result<Http, FetchError> {
        let mut policy = self.settings.policy(trust, None);
        policy.allow_hosts.extend(hub.host_str().map(str::to_owned));
        Ok(Http::new(self.tls()?, policy, self.settings.stall_timeout))
    }

    fn http(&self, trust: Trust, first: &Url) -> Result<Http, FetchError> {
        let policy = self.settings.policy(trust, first.host_str());
        Ok(Http::new(self.tls()?, policy, self.settings.stall_timeout))
    }

    fn tls(&self) -> Result<&Arc<ClientConfig>, FetchError> {
        if let Some(known) = self.tls.get() {
            return Ok(known);
        }
        let made = trusted(self.settings.ca_file.as_deref())?;
        Ok(self.tls.get_or_init(|| made))
    }

    /// One file after the other.
    async fn fetch_all(
        &self,
        http: &Http,
        store: &Arc<Store>,
        remotes: &[Remote],
        progress: Progress<'_>,
    ) -> Result<Gathered, FetchError> {
        let began = Instant::now();
        let known: u64 = remotes.iter().filter_map(|remote| remote.size_bytes).sum();
        let mut before = 0;
        let mut parts = Vec::with_capacity(remotes.len());
        for remote in remotes {
            let mut told = |done: u64, total: u64| progress(before + done, known.max(before + total));
            let downloaded = download(http, store, &self.settings, remote, &mut told).await?;
            before += downloaded.staging.length()?;
            parts.push(Part::Fetched { staging: downloaded.staging, sha256: downloaded.sha256 });
        }
        Ok(Gathered { parts, pinned: None, fetch_seconds: Some(began.elapsed().as_secs_f64()) })
    }
}

fn https_remote(location: &Location) -> Option<Remote> {
    let Location::Https(url) = location else { return None };
    Some(Remote {
        location: location.to_string(),
        key: url.to_string(),
        address: Address::Fixed { url: url.clone(), secret: None },
        sha256: None,
        size_bytes: None,
    })
}

fn s3_remote(bucket: &Bucket, location: &Location) -> Option<Result<Remote, FetchError>> {
    let Location::S3 { key, .. } = location else { return None };
    let object = bucket.object(key, location.to_string());
    Some(object.map(|object| Remote {
        location: location.to_string(),
        key: location.to_string(),
        address: Address::Signed(Box::new(object)),
        sha256: None,
        size_bytes: None,
    }))
}
