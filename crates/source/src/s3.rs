//! Objects in S3 and what speaks its protocol: credentials as AWS's own tools find them, then a signed URL, so that the
//! transfer itself is like any other.

use crate::error::FetchError;
use http_body_util::BodyExt;
use hyper::Method;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use object_store::{
    ClientOptions,
    aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey},
    client::{
        HttpClient, HttpConnector as Connector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody, HttpResponse,
        HttpResponseBody, HttpService,
    },
    path::Path as ObjectPath,
    signer::Signer,
};
use rustls::ClientConfig;
use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};
use url::Url;

/// How long a signed URL gives the object. It is signed anew for each attempt.
const SIGNATURE_LIFETIME: Duration = Duration::from_secs(3600);
/// The longest shared file of AWS's tools that is read.
const SHARED_FILE_BYTES_MAX: u64 = 1 << 20;
/// How long a service that gives credentials may take.
const CREDENTIALS_TIMEOUT: Duration = Duration::from_secs(10);

/// An object that can be asked for.
pub(crate) struct Object {
    store: Arc<AmazonS3>,
    path: ObjectPath,
    location: String,
}

/// A bucket of the endpoint that this process's environment names.
pub(crate) struct Bucket {
    store: Arc<AmazonS3>,
    name: String,
}

impl Bucket {
    /// Finds credentials, region and endpoint. Asks nobody yet.
    pub(crate) fn open(bucket: &str, tls: &Arc<ClientConfig>) -> Result<Self, FetchError> {
        let mut builder = AmazonS3Builder::from_env();
        for (key, value) in shared_settings(&builder) {
            builder = builder.with_config(key, value);
        }
        let plain = endpoint_of(&builder).is_some_and(|endpoint| endpoint.starts_with("http://"));
        let built = builder
            .with_bucket_name(bucket)
            .with_allow_http(plain)
            .with_http_connector(Credentials(tls.clone()))
            .build();
        let wrong = |error| FetchError::Local(format!("the AWS_* settings of this process cannot be used: {error}"));
        Ok(Self { store: Arc::new(built.map_err(wrong)?), name: bucket.to_owned() })
    }

    /// Where it is.
    pub(crate) async fn endpoint(&self) -> Result<Url, FetchError> {
        self.object("any", format!("s3://{}", self.name))?.signed_url().await
    }

    pub(crate) fn object(&self, key: &str, location: String) -> Result<Object, FetchError> {
        let path = ObjectPath::parse(key).map_err(|error| FetchError::Local(format!("{location}: {error}")))?;
        Ok(Object { store: self.store.clone(), path, location })
    }
}

impl Object {
    /// A URL that gives the object to whoever has it, for a while.
    pub(crate) async fn signed_url(&self) -> Result<Url, FetchError> {
        self.store.signed_url(Method::GET, &self.path, SIGNATURE_LIFETIME).await.map_err(|error| {
            let found =
                "no credentials for it are found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE";
            FetchError::Refused { location: self.location.clone(), reason: format!("{found} ({error})") }
        })
    }
}

/// Where the store is, if not at AWS.
pub(crate) fn endpoint_of(builder: &AmazonS3Builder) -> Option<String> {
    let value = |key| builder.get_config_value(&key);
    value(AmazonS3ConfigKey::S3Endpoint).or_else(|| value(AmazonS3ConfigKey::Endpoint))
}

/// What AWS's tools keep in files and the environment does not say.
fn shared_settings(builder: &AmazonS3Builder) -> Vec<(AmazonS3ConfigKey, String)> {
    use AmazonS3ConfigKey as Key;
    let profile = std::env::var("AWS_PROFILE").unwrap_or_else(|_| "default".to_owned());
    let read = |variable: &str, name: &str| shared_file(variable, name).unwrap_or_default();
    let credentials = section(&read("AWS_SHARED_CREDENTIALS_FILE", "credentials"), &profile);
    let named = if profile == "default" { profile } else { format!("profile {profile}") };
    let config = section(&read("AWS_CONFIG_FILE", "config"), &named);
    let said = |key: Key| builder.get_config_value(&key).is_some();
    let mut found = Vec::new();
    let elsewhere = [Key::AccessKeyId, Key::WebIdentityTokenFile, Key::ContainerCredentialsRelativeUri];
    if !elsewhere.into_iter().any(said) && !said(Key::ContainerCredentialsFullUri) {
        let keys = [
            (Key::AccessKeyId, "aws_access_key_id"),
            (Key::SecretAccessKey, "aws_secret_access_key"),
            (Key::Token, "aws_session_token"),
        ];
        found.extend(
            keys.into_iter()
                .filter_map(|(key, name)| Some((key, credentials.get(name).or_else(|| config.get(name))?.clone()))),
        );
    }
    if !said(Key::Region) && !said(Key::DefaultRegion) {
        found.extend(config.get("region").map(|region| (Key::Region, region.clone())));
    }
    if endpoint_of(builder).is_none() {
        found.extend(config.get("endpoint_url").map(|endpoint| (Key::Endpoint, endpoint.clone())));
    }
    found
}

fn shared_file(variable: &str, name: &str) -> Option<String> {
    let named = std::env::var_os(variable).map(PathBuf::from);
    let path = named.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".aws").join(name)))?;
    if path.metadata().ok()?.len() > SHARED_FILE_BYTES_MAX {
        return None;
    }
    std::fs::read_to_string(path).ok()
}

/// The settings of one profile. Indented lines belong to a setting of their own and are none of ours.
fn section(text: &str, wanted: &str) -> BTreeMap<String, String> {
    let mut inside = false;
    let mut found = BTreeMap::new();
    for line in text.lines() {
        let trimmed = line.trim();
        if trimmed.is_empty() || trimmed.starts_with(['#', ';']) || line.starts_with([' ', '\t']) {
            continue;
        }
        if let Some(name) = trimmed.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            inside = name.trim() == wanted;
        } else if let (true, Some((key, value))) = (inside, trimmed.split_once('=')) {
            found.insert(key.trim().to_ascii_lowercase(), value.trim().to_owned());
        }
    }
    found
}

/// Talks to the services that give credentials, whose addresses this machine's own settings name.
#[derive(Debug)]
struct Credentials(Arc<ClientConfig>);

impl Connector for Credentials {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        let mut connector = HttpConnector::new();
        connector.enforce_http(false);
        connector.set_connect_timeout(Some(CREDENTIALS_TIMEOUT));
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(ClientConfig::clone(&self.0))
            .https_or_http()
            .enable_http1()
            .wrap_connector(connector);
        Ok(HttpClient::new(Service(Client::builder(TokioExecutor::new()).build(connector))))
    }
}

#[derive(Debug)]
struct Service(Client<HttpsConnector<HttpConnector>, HttpRequestBody>);

#[async_trait::async_trait]
impl HttpService for Service {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let response = match tokio::time::timeout(CREDENTIALS_TIMEOUT, self.0.request(request)).await {
            Ok(response) => response.map_err(|error| HttpError::new(HttpErrorKind::Connect, error))?,
            Err(elapsed) => return Err(HttpError::new(HttpErrorKind::Timeout, elapsed)),
        };
        let body =
            |body: hyper::body::Incoming| body.map_err(|error| HttpError::new(HttpErrorKind::Interrupted, error));
        Ok(response.map(|incoming| HttpResponseBody::new(body(incoming))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_is_read_and_the_others_are_not() {
        let text = "# mine\n[default]\naws_access_key_id = A\ns3 =\n  endpoint_url = nested\n\n[profile other]\nREGION=eu-1\n\
                    endpoint_url = http://127.0.0.1:1 \n; end\nnot a setting\n";
        assert_eq!(section(text, "default").get("aws_access_key_id").map(String::as_str), Some("A"));
        assert!(!section(text, "default").contains_key("endpoint_url"));
        let other = section(text, "profile other");
        assert_eq!((other["region"].as_str(), other["endpoint_url"].as_str()), ("eu-1", "http://127.0.0.1:1"));
        assert!(section(text, "absent").is_empty());
    }
}
