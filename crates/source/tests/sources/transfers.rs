//! Transfers: whole, cut off, stalled, changed, and with every kind of lie about them.

use crate::server::{LONG, Server, Then, cut, file, honest, reply, sha256};
use std::{sync::Mutex, time::Duration};
use warmset_source::{Environment, FetchError, Part, Settings};
use warmset_store::StoreError;

#[tokio::test]
async fn a_file_comes_as_it_is() {
    let server = Server::start(|asked, _| honest(asked, &file(3 << 20), "\"1\"")).await;
    let gathered = server.fetch(&server.url("/m.gguf")).await.unwrap();
    assert!(gathered.fetch_seconds.unwrap() > 0.0);
    assert!(matches!(&gathered.parts[..], [Part::Fetched { sha256: found, .. }] if *found == sha256(&file(3 << 20))));
    assert_eq!(server.publish(gathered), [file(3 << 20)]);
    let asked = &server.asked()[0];
    assert_eq!((asked.header("accept-encoding"), asked.header("range")), (Some("identity"), None));
    // Nothing is left of the transfer itself.
    let left = server.directory.path().join("store/unfinished").read_dir().unwrap().count();
    assert_eq!(left, 0);
}

#[tokio::test]
async fn a_file_of_unknown_length_comes_too() {
    let server = Server::start(|_, _| {
        let body = b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n";
        reply("200 OK", &[("transfer-encoding", "chunked")], body)
    })
    .await;
    let gathered = server.fetch(&server.url("/m.gguf")).await.unwrap();
    assert_eq!(server.publish(gathered), [b"hello world"]);
}

#[tokio::test]
async fn all_parts_of_a_split_model_come_in_order() {
    let server = Server::start(|asked, _| reply("200 OK", &[], asked.path.as_bytes())).await;
    let gathered = server.fetch(&server.url("/m-00001-of-00003.gguf?k=v")).await.unwrap();
    let expected = [1, 2, 3].map(|part| format!("/m-0000{part}-of-00003.gguf?k=v").into_bytes());
    assert_eq!(server.publish(gathered), expected);
}

#[tokio::test]
async fn what_was_cut_off_goes_on_where_it_stopped() {
    for then in [Then::Close, Then::Stall] {
        let server = Server::start(move |asked, turn| {
            let answer = honest(asked, &file(1 << 20), "\"1\"");
            if turn < 3 { (cut(answer, 200_000).0, then) } else { answer }
        })
        .await;
        // Where nothing else tells the end of it, silence does.
        let stall_timeout = if then == Then::Stall { Duration::from_secs(1) } else { LONG };
        let settings = Settings { stall_timeout, ..server.settings() };
        let gathered = server.fetch_with(&server.url("/m.gguf"), settings, Environment::default()).await.unwrap();
        assert_eq!(server.publish(gathered), [file(1 << 20)], "{then:?}");
        let from: Vec<_> = server.asked().iter().map(|asked| asked.from()).collect();
        assert_eq!(from, [None, Some(200_000), Some(400_000), Some(600_000)]);
        assert_eq!(server.asked()[1].header("if-range"), Some("\"1\""));
    }
}

#[tokio::test]
async fn another_process_goes_on_where_one_stopped() {
    let server = Server::start(|asked, turn| {
        let answer = honest(asked, &file(1 << 20), "\"1\"");
        if turn == 0 {
            cut(answer, 300_000)
        } else if turn < 6 {
            reply("503 Busy", &[], b"")
        } else {
            answer
        }
    })
    .await;
    let error = server.fetch(&server.url("/m.gguf")).await.unwrap_err();
    assert!(matches!(error, FetchError::Status { status: 503, .. }), "{error}");
    assert!(server.is_empty());
    let gathered = server.fetch(&server.url("/m.gguf")).await.unwrap();
    assert_eq!(server.publish(gathered), [file(1 << 20)]);
    assert_eq!(server.asked().last().unwrap().from(), Some(300_000));
}

#[tokio::test]
async fn a_file_that_changed_meanwhile_comes_from_the_beginning() {
    // A server that keeps to the rules sends the new one whole; one that ignores them is found out by its tag.
    for honours in [true, false] {
        let server = Server::start(move |asked, turn| {
            let (bytes, tag) = if turn == 0 { (file(1 << 20), "\"1\"") } else { (file(900_000), "\"2\"") };
            let mut asked = asked.clone();
            if !honours {
                asked.headers.remove("if-range");
            }
            let answer = honest(&asked, &bytes, tag);
            if turn == 0 { cut(answer, 300_000) } else { answer }
        })
        .await;
        let gathered = server.fetch(&server.url("/m.gguf")).await.unwrap();
        assert_eq!(server.publish(gathered), [file(900_000)], "{honours}");
    }
}

#[tokio::test]
async fn without_anything_that_tells_a_change_it_begins_anew() {
    let server = Server::start(|_, turn| {
        let answer = reply("200 OK", &[], &file(100_000));
        if turn == 0 { cut(answer, 50_000) } else { answer }
    })
    .await;
    let gathered = server.fetch(&server.url("/m.gguf")).await.unwrap();
    assert_eq!(server.publish(gathered), [file(100_000)]);
    assert_eq!(server.asked()[1].from(), None);
}

#[tokio::test]
async fn lies_about_ranges_and_lengths_are_found_out() {
    let whole = || file(100_000);
    let ranges =
        ["bytes 0-99999/100000", "bytes 50000-60000/100000", "bytes 50000-99999/*", "50000", "bytes 50000-1/2"];
    for range in ranges {
        let server = Server::start(move |asked, turn| match turn {
            0 => cut(honest(asked, &whole(), "\"1\""), 50_000),
            _ => reply("206 Partial Content", &[("content-range", range), ("etag", "\"1\"")], &whole()[50_000..]),
        })
        .await;
        let error = server.fetch(&server.url("/m.gguf")).await.unwrap_err();
        assert!(matches!(error, FetchError::Lies { .. }), "{range}: {error}");
        assert!(server.is_empty());
    }
    // A part that nobody asked for, and a packed file.
    for (status, header) in
        [("206 Partial Content", ("content-range", "bytes 0-9/10")), ("200 OK", ("content-encoding", "gzip"))]
    {
        let server = Server::start(move |_, _| reply(status, &[header], b"0123456789")).await;
        let error = server.fetch(&server.url("/m.gguf")).await.unwrap_err();
        assert!(matches!(error, FetchError::Lies { .. }), "{status}: {error}");
    }
    // Less than announced, again and again: given up, and nothing is taken for a file.
    let server = Server::start(|_, _| reply("200 OK", &[("content-length", "10")], b"01234")).await;
    let error = server.fetch(&server.url("/m.gguf")).await.unwrap_err();
    assert!(matches!(error, FetchError::Broken { .. }), "{error}");
    assert!(server.is_empty());
    assert!(server.asked().len() <= 6, "it is given up after a few attempts");
}

#[tokio::test]
async fn limits_of_size_time_and_disk_hold() {
    let server = Server::start(|asked, _| honest(asked, &file(100_000), "\"1\"")).await;
    let small = Settings { max_bytes: 99_999, ..server.settings() };
    let error = server.fetch_with(&server.url("/m.gguf"), small, Environment::default()).await.unwrap_err();
    assert!(matches!(error, FetchError::TooLarge { size_bytes: 100_000, .. }), "{error}");

    // One that does not say how much comes is stopped when it is too much.
    let endless = Server::start(|_, _| {
        let mut body = Vec::new();
        for _ in 0..20 {
            body.extend(b"2710\r\n");
            body.extend(file(10_000));
            body.extend(b"\r\n");
        }
        reply("200 OK", &[("transfer-encoding", "chunked")], &body)
    })
    .await;
    let small = Settings { max_bytes: 99_999, ..endless.settings() };
    let error = endless.fetch_with(&endless.url("/m.gguf"), small, Environment::default()).await.unwrap_err();
    assert!(matches!(error, FetchError::TooLarge { .. }), "{error}");

    let huge =
        Server::start(|_, _| (cut(reply("200 OK", &[("content-length", "9007199254740992")], b"x"), 1).0, Then::Stall))
            .await;
    let error = huge.fetch(&huge.url("/m.gguf")).await.unwrap_err();
    assert!(matches!(error, FetchError::TooLarge { .. }), "{error}");
    let vast =
        Server::start(|_, _| (cut(reply("200 OK", &[("content-length", "17592186044416")], b"x"), 1).0, Then::Stall))
            .await;
    let error = vast.fetch(&vast.url("/m.gguf")).await.unwrap_err();
    assert!(matches!(error, FetchError::Store(StoreError::DiskFull { .. })), "{error}");

    let slow = Server::start(|_, _| (Vec::new(), Then::Stall)).await;
    let short = Settings { timeout: Duration::from_millis(200), ..slow.settings() };
    let error = slow.fetch_with(&slow.url("/m.gguf"), short, Environment::default()).await.unwrap_err();
    assert!(matches!(error, FetchError::TooLong { .. }), "{error}");
}

#[tokio::test]
async fn progress_ends_with_everything_and_counts_what_was_there() {
    let server = Server::start(|asked, turn| {
        let answer = honest(asked, &file(1 << 20), "\"1\"");
        if turn == 0 { cut(answer, 400_000) } else { answer }
    })
    .await;
    let told = Mutex::new(Vec::new());
    let fetcher = warmset_source::Fetcher::new(server.settings(), Environment::default());
    let location = warmset_source::Location::parse(&server.url("/m.gguf")).unwrap();
    let mut tell = |done, total| told.lock().unwrap().push((done, total));
    let trust = warmset_source::Trust::Caller;
    fetcher.gather(&location, true, trust, &server.store, &mut tell).await.unwrap();
    let told = told.into_inner().unwrap();
    assert_eq!((told.first(), told.last()), (Some(&(0, 1 << 20)), Some(&(1 << 20, 1 << 20))));
    assert!(told.is_sorted());
}

#[tokio::test]
async fn two_fetches_of_one_file_do_not_write_it_both() {
    let server =
        Server::start(|_, _| (cut(reply("200 OK", &[("content-length", "10")], b"01234"), 5).0, Then::Stall)).await;
    let url = server.url("/m.gguf");
    let first = server.fetch(&url);
    let second = async {
        while server.asked().is_empty() {
            tokio::task::yield_now().await;
        }
        server.fetch(&url).await.unwrap_err()
    };
    tokio::select! {
        _ = first => panic!("the first cannot end"),
        error = second => assert!(matches!(error, FetchError::Store(StoreError::BeingFetched)), "{error}"),
    }
}
