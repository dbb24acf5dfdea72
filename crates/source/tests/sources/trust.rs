//! Whom the fetcher talks to, and what it tells them: addresses, redirects, credentials, hubs.

use crate::server::{Asked, Reply, Server, file, honest, reply, sha256};
use serde_json::json;
use warmset_source::{Environment, FetchError, Fetcher, Location, Part, Settings, Trust};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

fn redirect(target: &str) -> Reply {
    reply("302 Found", &[("location", target)], b"")
}

async fn refusal(server: &Server, source: &str, settings: Settings) -> String {
    match server.fetch_with(source, settings, Environment::default()).await.unwrap_err() {
        FetchError::Refused { reason, .. } => reason,
        other => panic!("{other}"),
    }
}

#[tokio::test]
async fn an_address_that_is_not_public_is_refused_unless_it_is_allowed() {
    let server = Server::start(|asked, _| honest(asked, &file(10), "\"1\"")).await;
    let closed = Settings { allow_hosts: Vec::new(), ..server.settings() };
    for host in ["localhost", "127.0.0.1", "[::1]", "2130706433"] {
        let source = format!("https://{host}:{}/m.gguf", server.port);
        let reason = refusal(&server, &source, closed.clone()).await;
        assert!(reason.contains("not a public address") && reason.contains("allow_hosts"), "{reason}");
    }
    assert!(server.asked().is_empty(), "nobody was asked");
    let open = Settings { allow_private: true, ..closed.clone() };
    assert!(server.fetch_with(&server.url("/m.gguf"), open, Environment::default()).await.is_ok());
    // Who runs the machine may name any host.
    let location = Location::parse(&server.url("/m.gguf")).unwrap();
    let fetcher = Fetcher::new(closed, Environment::default());
    assert!(fetcher.gather(&location, true, Trust::Operator, &server.store, &mut |_, _| {}).await.is_ok());
}

#[tokio::test]
async fn a_redirect_is_checked_like_the_first_address() {
    for target in
        ["https://169.254.169.254/latest", "https://127.0.0.1/x", "https://[fd00:ec2::254]/x", "http://localhost/x"]
    {
        let server = Server::start(move |_, _| redirect(target)).await;
        // Even if the host that redirects was named by whoever runs the machine.
        let location = Location::parse(&server.url("/m.gguf")).unwrap();
        let fetcher = Fetcher::new(server.settings(), Environment::default());
        let error = fetcher.gather(&location, true, Trust::Operator, &server.store, &mut |_, _| {}).await.unwrap_err();
        assert!(matches!(error, FetchError::Refused { .. }), "{target}: {error}");
        assert_eq!(server.asked().len(), 1);
    }
    for target in ["http://example.com/x", "file:///etc/passwd", "https://u:p@localhost/x", "gopher://x/"] {
        let server = Server::start(move |_, _| redirect(target)).await;
        refusal(&server, &server.url("/m.gguf"), server.settings()).await;
    }
    let server = Server::start(|_, _| redirect("/m.gguf")).await;
    let error = server.fetch(&server.url("/m.gguf")).await.unwrap_err();
    assert!(matches!(&error, FetchError::Lies { reason, .. } if reason.contains("more than 10 times")), "{error}");
    assert_eq!(server.asked().len(), 11);
    let server = Server::start(|asked, _| match asked.path.as_str() {
        "/m.gguf" => redirect("/real"),
        _ => honest(asked, &file(10), "\"1\""),
    })
    .await;
    let gathered = server.fetch(&server.url("/m.gguf")).await.unwrap();
    assert_eq!(server.publish(gathered), [file(10)]);
}

#[tokio::test]
async fn a_certificate_that_nobody_vouches_for_is_refused() {
    let server = Server::start(|asked, _| honest(asked, &file(10), "\"1\"")).await;
    let distrusting = Settings { ca_file: None, ..server.settings() };
    let error = server.fetch_with(&server.url("/m.gguf"), distrusting, Environment::default()).await.unwrap_err();
    assert!(matches!(&error, FetchError::Refused { reason, .. } if reason.contains("certificate")), "{error}");
    let absent = Settings { ca_file: Some("/nowhere.pem".into()), ..server.settings() };
    let error = server.fetch_with(&server.url("/m.gguf"), absent, Environment::default()).await.unwrap_err();
    assert!(error.to_string().contains("ca_file /nowhere.pem"), "{error}");
}

#[tokio::test]
async fn refusals_are_said_with_what_to_do() {
    for (status, words) in [("401 No", "credentials"), ("403 No", "credentials"), ("404 No", "check the source")] {
        let server = Server::start(move |_, _| reply(status, &[], b"go away")).await;
        let error = server.fetch(&server.url("/m.gguf?token=SECRET")).await.unwrap_err().to_string();
        assert!(error.contains(words) && !error.contains("SECRET"), "{error}");
        assert_eq!(server.asked().len(), 1, "no use in asking again");
    }
}

/// A hub with one repository.
fn hub(asked: &Asked, bytes: &[u8], sha256: &str, elsewhere: Option<&str>) -> Reply {
    let resolve = format!("/org/repo/resolve/{COMMIT}/dir/m.gguf");
    if asked.path.starts_with("/api/models/org/repo/revision/") {
        let file = json!({"rfilename": "dir/m.gguf", "size": bytes.len(), "lfs": {"sha256": sha256, "size": bytes.len(), "pointerSize": 1}});
        return reply("200 OK", &[], json!({"sha": COMMIT, "siblings": [file]}).to_string().as_bytes());
    }
    match elsewhere {
        _ if asked.path != resolve => reply("404 Not Found", &[], b""),
        Some(target) => redirect(target),
        None => honest(asked, bytes, "\"1\""),
    }
}

fn environment(server: &Server) -> Environment {
    Environment {
        hub_endpoint: Some(format!("https://localhost:{}", server.port)),
        hub_token: Some("hf_SECRET".to_owned()),
        ..Environment::default()
    }
}

#[tokio::test]
async fn a_hubs_revision_is_pinned_and_its_hash_is_checked() {
    let hex = sha256(&file(5000)).hex();
    let server = Server::start(move |asked, _| hub(asked, &file(5000), &hex, None)).await;
    // The endpoint needs no allowance: whoever runs the machine has set it.
    let settings = Settings { allow_hosts: Vec::new(), ..server.settings() };
    let gathered = server.fetch_with("hf://org/repo/dir/m.gguf", settings, environment(&server)).await.unwrap();
    assert_eq!(gathered.pinned, Some(format!("hf://org/repo/dir/m.gguf@{COMMIT}")));
    assert_eq!(server.publish(gathered), [file(5000)]);
    let asked = server.asked();
    assert_eq!(asked[0].path, "/api/models/org/repo/revision/main?blobs=true");
    assert!(asked.iter().all(|asked| asked.header("authorization") == Some("Bearer hf_SECRET")));

    let error =
        server.fetch_with("hf://org/repo/other.gguf", server.settings(), environment(&server)).await.unwrap_err();
    assert!(matches!(error, FetchError::Status { status: 404, .. }), "{error}");
    let other = "f".repeat(40);
    let source = format!("hf://org/repo/dir/m.gguf@{other}");
    let error = server.fetch_with(&source, server.settings(), environment(&server)).await.unwrap_err();
    assert!(matches!(error, FetchError::Lies { .. }), "{error}");
}

#[tokio::test]
async fn a_file_that_is_not_what_the_hub_promised_is_not_kept() {
    let hex = sha256(&file(5000)).hex();
    let server = Server::start(move |asked, _| {
        let mut bytes = file(5000);
        bytes[4321] ^= 1;
        hub(asked, &bytes, &hex, None)
    })
    .await;
    let error =
        server.fetch_with("hf://org/repo/dir/m.gguf", server.settings(), environment(&server)).await.unwrap_err();
    assert!(matches!(&error, FetchError::Mismatch { expected, .. } if *expected == sha256(&file(5000))), "{error}");
    assert!(!error.to_string().contains("SECRET") && server.is_empty());
    // Another length than the hub says is not even taken.
    let hex = sha256(&file(5000)).hex();
    let server = Server::start(move |asked, _| {
        if asked.path.starts_with("/api") {
            hub(asked, &file(5000), &hex, None)
        } else {
            hub(asked, &file(4000), &hex, None)
        }
    })
    .await;
    let error =
        server.fetch_with("hf://org/repo/dir/m.gguf", server.settings(), environment(&server)).await.unwrap_err();
    assert!(matches!(error, FetchError::Lies { .. }), "{error}");
}

#[tokio::test]
async fn bytes_that_were_bad_before_are_fetched_anew_once() {
    let hex = sha256(&file(5000)).hex();
    let server = Server::start(move |asked, turn| {
        let mut bytes = file(5000);
        if turn == 1 {
            bytes[10] ^= 1;
            return crate::server::cut(hub(asked, &bytes, &hex, None), 1000);
        }
        hub(asked, &bytes, &hex, None)
    })
    .await;
    let gathered =
        server.fetch_with("hf://org/repo/dir/m.gguf", server.settings(), environment(&server)).await.unwrap();
    assert_eq!(server.publish(gathered), [file(5000)]);
    let from: Vec<_> = server.asked().iter().map(Asked::from).collect();
    assert_eq!(from, [None, None, Some(1000), None]);
}

#[tokio::test]
async fn a_token_goes_to_no_other_host() {
    let other = Server::start(|asked, _| honest(asked, &file(5000), "\"1\"")).await;
    let target = format!("https://localhost:{}/blob?signature=1", other.port);
    let hex = sha256(&file(5000)).hex();
    let server = Server::start(move |asked, _| hub(asked, &file(5000), &hex, Some(&target))).await;
    let both = server.directory.path().join("both.pem");
    let certificates = [server.ca_file(), other.ca_file()].map(|path| std::fs::read_to_string(path).unwrap());
    std::fs::write(&both, certificates.concat()).unwrap();
    let settings = Settings { ca_file: Some(both), ..server.settings() };
    let gathered = server.fetch_with("hf://org/repo/dir/m.gguf", settings, environment(&server)).await.unwrap();
    assert_eq!(server.publish(gathered), [file(5000)]);
    assert_eq!(server.asked()[1].header("authorization"), Some("Bearer hf_SECRET"));
    assert_eq!(other.asked()[0].header("authorization"), None);
}

#[tokio::test]
async fn what_hugging_faces_tools_have_is_read_where_it_lies() {
    let hex = sha256(&file(5000)).hex();
    let server = Server::start(move |asked, _| hub(asked, &file(5000), &hex, None)).await;
    let cache = server.directory.path().join("hub");
    let folder = cache.join("models--org--repo");
    let snapshot = folder.join("snapshots").join(COMMIT).join("dir");
    for directory in [&snapshot, &folder.join("blobs"), &folder.join("refs")] {
        std::fs::create_dir_all(directory).unwrap();
    }
    let blob = folder.join("blobs").join(sha256(&file(5000)).hex());
    std::fs::write(&blob, file(5000)).unwrap();
    std::fs::write(folder.join("refs/main"), COMMIT).unwrap();
    std::os::unix::fs::symlink(&blob, snapshot.join("m.gguf")).unwrap();
    let environment = Environment { hub_cache: Some(cache.clone()), ..environment(&server) };
    let is_cached = |part: &Part| matches!(part, Part::Local { path, sha256: Some(known) } if path.starts_with(&cache) && *known == sha256(&file(5000)));
    let source = "hf://org/repo/dir/m.gguf";
    let gathered = server.fetch_with(source, server.settings(), environment.clone()).await.unwrap();
    assert!(is_cached(&gathered.parts[0]) && gathered.pinned.unwrap().ends_with(COMMIT));
    assert_eq!(server.asked().len(), 1, "only the revision was asked for");
    // Without the hub the cache's own word counts.
    for environment in [
        Environment { hub_offline: true, ..environment.clone() },
        Environment { hub_endpoint: Some("https://localhost:1".into()), ..environment.clone() },
    ] {
        let gathered = server.fetch_with(source, server.settings(), environment).await.unwrap();
        assert!(is_cached(&gathered.parts[0]) && gathered.pinned.unwrap().ends_with(COMMIT));
    }
    let offline = Environment { hub_offline: true, ..environment };
    let error = server.fetch_with("hf://org/repo/other.gguf", server.settings(), offline).await.unwrap_err();
    assert!(error.to_string().contains("not in the Hugging Face cache"), "{error}");
}
