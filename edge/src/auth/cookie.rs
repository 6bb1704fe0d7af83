//! The key of a person who looks at pages, in a cookie. Only roles with pages take it
//! ([`super::Auth::with_cookies`]).
//!
//! A browser sends a cookie with every request to its host, also with those that a page of another
//! site makes. So the cookie counts only if the browser says that this site's own page sent the
//! request, or that a person opened the address ([`from_here`]). `SameSite=Strict` says the same to
//! browsers; neither relies on the other. Scripts cannot read the cookie (`HttpOnly`).

use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, Method, Uri, header};

/// Over TLS. Browsers take a cookie with this prefix only over TLS, for this host alone.
const SECURE: &str = "__Host-springtide_key";
const PLAIN: &str = "springtide_key";
/// A working day.
const SECONDS_MAX: u32 = 12 * 3600;
/// What browsers keep of a cookie is at least 4096 bytes, with its name and attributes.
const BYTES_MAX: usize = 3900;
/// What a login at the identity provider must bring back.
const ATTEMPT: &str = "springtide_login";
const SECURE_ATTEMPT: &str = "__Host-springtide_login";
const ATTEMPT_SECONDS_MAX: u32 = 600;

/// The header `Set-Cookie` that keeps `key` in the browser. `None`: no key has these characters, or so many.
pub fn set(key: &str, tls: bool) -> Option<HeaderValue> {
    let harmless = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    if key.is_empty() || key.len() > BYTES_MAX || !key.bytes().all(harmless) {
        return None;
    }
    let (name, secure) = if tls { (SECURE, "; Secure") } else { (PLAIN, "") };
    let cookie = format!("{name}={key}; Path=/; Max-Age={SECONDS_MAX}; HttpOnly; SameSite=Strict{secure}");
    let mut value = HeaderValue::from_str(&cookie).ok()?;
    value.set_sensitive(true);
    Some(value)
}

/// Headers `Set-Cookie` that remove the key from the browser.
pub fn removed() -> [HeaderValue; 2] {
    [
        HeaderValue::from_static("__Host-springtide_key=; Path=/; Max-Age=0; HttpOnly; SameSite=Strict; Secure"),
        HeaderValue::from_static("springtide_key=; Path=/; Max-Age=0; HttpOnly; SameSite=Strict"),
    ]
}

/// The header `Set-Cookie` that keeps an attempt to log in; an empty one removes it. The provider's redirect comes from
/// another site, so it is not `Strict`.
pub fn set_attempt(attempt: &str, tls: bool) -> Option<HeaderValue> {
    let seconds = if attempt.is_empty() { 0 } else { ATTEMPT_SECONDS_MAX };
    let (name, secure) = if tls {
        (SECURE_ATTEMPT, "; Secure")
    } else {
        (ATTEMPT, "")
    };
    let cookie = format!("{name}={attempt}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Lax{secure}");
    let mut value = HeaderValue::from_str(&cookie).ok()?;
    value.set_sensitive(true);
    Some(value)
}

/// The attempt to log in that this browser has begun. Over TLS a neighbour cannot set it.
pub fn attempt(headers: &HeaderMap, tls: bool) -> Option<&str> {
    let wanted = if tls { SECURE_ATTEMPT } else { ATTEMPT };
    pairs(headers)
        .find(|(name, _)| *name == wanted)
        .map(|(_, attempt)| attempt)
}

/// Whether the browser keeps a key, valid or not.
pub fn is_kept(headers: &HeaderMap) -> bool {
    pairs(headers).any(|(name, key)| (name == SECURE || name == PLAIN) && !key.is_empty())
}

fn pairs(headers: &HeaderMap) -> impl Iterator<Item = (&str, &str)> {
    let all = headers.get_all(header::COOKIE).into_iter();
    let pairs = all
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(';'));
    pairs.filter_map(|pair| pair.trim().split_once('='))
}

/// The key in the cookie, if the request comes [from here](from_here).
pub(super) fn secret<'a>(method: &Method, uri: &Uri, headers: &'a HeaderMap) -> Option<&'a str> {
    if !from_here(method, uri, headers) {
        return None;
    }
    let (mut secure, mut plain) = (None, None);
    for (name, key) in pairs(headers).filter(|(_, key)| !key.is_empty()) {
        match name {
            SECURE => secure = secure.or(Some(key)),
            PLAIN => plain = plain.or(Some(key)),
            _ => {}
        }
    }
    // a neighbour on the network can set the plain one, but not the other
    secure.or(plain)
}

/// Whether this site's own page sent the request, or somebody opened its address.
///
/// Pages cannot set `Sec-Fetch-Site`. Browsers leave it out where there is no TLS and the host is not
/// this machine; then `Origin` decides, which they send with every request that changes something.
pub fn from_here(method: &Method, uri: &Uri, headers: &HeaderMap) -> bool {
    let reads = matches!(*method, Method::GET | Method::HEAD);
    if let Some(site) = headers.get("sec-fetch-site") {
        return site == "same-origin" || (reads && site == "none");
    }
    let mut origins = headers.get_all(header::ORIGIN).iter();
    match (origins.next(), origins.next()) {
        (None, _) => reads,
        (Some(origin), None) => {
            let origin = origin.to_str().ok().and_then(|origin| origin.split_once("://"));
            let asked = asked(uri, headers);
            origin
                .zip(asked)
                .is_some_and(|((_, origin), asked)| origin.eq_ignore_ascii_case(asked.as_str()))
        }
        (Some(_), Some(_)) => false,
    }
}

/// The host and port that the client has asked.
fn asked(uri: &Uri, headers: &HeaderMap) -> Option<Authority> {
    let host = || headers.get(header::HOST)?.to_str().ok()?.parse().ok();
    uri.authority().cloned().or_else(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(method: &Method, more: &[(&'static str, &str)]) -> Option<String> {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("host", "tide.example:8002"),
            ("cookie", "a=b; springtide_key=spring_1; c=d"),
        ] {
            headers.insert(name, value.parse().unwrap());
        }
        for (name, value) in more {
            headers.append(*name, value.parse().unwrap());
        }
        secret(method, &Uri::from_static("/v1/canaries"), &headers).map(str::to_owned)
    }

    #[test]
    fn the_cookie_counts_for_what_a_person_opens_and_for_requests_of_our_own_pages() {
        let here = ("origin", "http://tide.example:8002");
        for (method, headers) in [
            (Method::GET, &[][..]),
            (Method::GET, &[("sec-fetch-site", "none")]),
            (Method::GET, &[("sec-fetch-site", "same-origin")]),
            (Method::POST, &[("sec-fetch-site", "same-origin"), here]),
            (Method::POST, &[here]),
            (Method::PUT, &[("origin", "https://TIDE.example:8002")]),
        ] {
            assert_eq!(
                request(&method, headers).as_deref(),
                Some("spring_1"),
                "{method} {headers:?}"
            );
        }
    }

    #[test]
    fn the_cookie_does_not_count_for_what_other_sites_send() {
        let elsewhere = ("origin", "http://evil.example");
        for (method, headers) in [
            (Method::POST, &[][..]),
            (Method::DELETE, &[("sec-fetch-site", "none")]),
            (Method::GET, &[("sec-fetch-site", "cross-site")]),
            (Method::POST, &[("sec-fetch-site", "same-site")]),
            (
                Method::POST,
                &[("sec-fetch-site", "cross-site"), ("origin", "http://tide.example:8002")],
            ),
            (Method::GET, &[elsewhere]),
            (Method::POST, &[elsewhere]),
            (Method::POST, &[("origin", "null")]),
            // another port is another program
            (Method::POST, &[("origin", "http://tide.example:3000")]),
            (Method::POST, &[("origin", "http://tide.example:8002"), elsewhere]),
        ] {
            assert_eq!(request(&method, headers), None, "{method} {headers:?}");
        }
    }

    #[test]
    fn a_cookie_is_for_this_host_and_hidden_from_scripts() {
        let plain = set("spring_0af1", false).unwrap();
        assert!(plain.is_sensitive(), "no log shows it");
        let plain = plain.to_str().unwrap();
        assert!(plain.starts_with("springtide_key=spring_0af1; Path=/;"), "{plain}");
        assert!(
            plain.contains("HttpOnly; SameSite=Strict") && !plain.contains("Domain"),
            "{plain}"
        );
        let secure = set("spring_0af1", true).unwrap();
        let secure = secure.to_str().unwrap();
        assert!(
            secure.starts_with("__Host-springtide_key=") && secure.ends_with("; Secure"),
            "{secure}"
        );
        for key in ["", "a;Domain=evil", "a b", "a\r\nx: y", "ü", "a,b", "\"a\""] {
            assert!(set(key, true).is_none(), "{key:?}");
        }
    }

    #[test]
    fn an_empty_or_foreign_cookie_is_no_key() {
        let mut headers = HeaderMap::new();
        for value in ["springtide_key=", "x_springtide_key=a", "springtide_key"] {
            headers.insert(header::COOKIE, value.parse().unwrap());
            assert_eq!(secret(&Method::GET, &Uri::from_static("/"), &headers), None, "{value}");
        }
        headers.insert(
            header::COOKIE,
            "springtide_key=; __Host-springtide_key=spring_2".parse().unwrap(),
        );
        assert_eq!(secret(&Method::GET, &Uri::from_static("/"), &headers), Some("spring_2"));
    }
}
