//! Which requests a role answers that needs no key: those that a program on this machine sends to
//! it, and not those that a page of another site makes a browser send.
//!
//! A page can do so in two ways. It can have its own name point to 127.0.0.1 (DNS rebinding), so
//! that the browser takes the role for the page's own server; then `Host` has the page's name. Or
//! it can send a request to another site; then browsers say so in `Origin` or `Sec-Fetch-Site`.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;

use crate::problem::Problem;

/// The names under which a role may be reached, beside `localhost`, `*.localhost` and loopback
/// addresses.
#[derive(Debug, Clone, Default)]
pub struct Hosts(Vec<String>);

impl Hosts {
    pub fn new(names: &[String]) -> Self {
        Self(names.iter().map(|name| name.to_ascii_lowercase()).collect())
    }

    fn allows(&self, authority: &Authority) -> bool {
        let host = authority.host().to_ascii_lowercase();
        let host = host.trim_start_matches('[').trim_end_matches(']').trim_end_matches('.');
        match host.parse::<IpAddr>() {
            Ok(address) if address.to_canonical().is_loopback() => true,
            _ => host == "localhost" || host.ends_with(".localhost") || self.0.iter().any(|name| name == host),
        }
    }
}

/// Middleware: refuses what is not for this role.
pub(crate) async fn check(State(hosts): State<Arc<Hosts>>, request: Request, next: Next) -> Result<Response, Problem> {
    let authority = addressed(&hosts, &request)?;
    from_here(&authority, &request)?;
    Ok(next.run(request).await)
}

/// The host and port that the client has asked.
fn addressed(hosts: &Hosts, request: &Request) -> Result<Authority, Problem> {
    let in_uri = request.uri().authority().cloned();
    let mut asked = Vec::from_iter(in_uri);
    for host in request.headers().get_all(header::HOST) {
        let host = host.to_str().ok().and_then(|host| host.parse().ok());
        asked.push(host.ok_or_else(|| Problem::bad_request("the header Host is not a host"))?);
    }
    if let Some(other) = asked.iter().find(|host| !hosts.allows(host)) {
        return Err(foreign(format_args!(
            "no key is required here, so only local names are answered, and {:?} is not one: \
             call 127.0.0.1, or add the name to listen.hosts",
            other.host()
        )));
    }
    let missing = || Problem::bad_request("the request has no header Host");
    asked.into_iter().next().ok_or_else(missing)
}

fn from_here(authority: &Authority, request: &Request) -> Result<(), Problem> {
    let headers = request.headers();
    for origin in headers.get_all(header::ORIGIN) {
        let origin = origin.to_str().unwrap_or_default();
        let origin_authority = origin.split_once("://").map(|(_, authority)| authority);
        if !origin_authority.is_some_and(|origin| origin.eq_ignore_ascii_case(authority.as_str())) {
            return Err(foreign(format_args!(
                "no key is required here, and the page {origin:?} is of another site"
            )));
        }
    }
    let site = headers.get("sec-fetch-site").and_then(|site| site.to_str().ok());
    let opens_a_tab = request.method() == Method::GET && is_navigation(headers);
    if matches!(site, Some("cross-site" | "same-site")) && !opens_a_tab {
        return Err(foreign(
            "no key is required here, and a page of another site has sent this",
        ));
    }
    Ok(())
}

/// Whether somebody follows a link: the page with the link does not see the answer.
fn is_navigation(headers: &HeaderMap) -> bool {
    let is = |name, wanted: &str| headers.get(name).is_some_and(|value| value == wanted);
    is("sec-fetch-mode", "navigate") && is("sec-fetch-dest", "document")
}

fn foreign(detail: impl std::fmt::Display) -> Problem {
    let title = "The request comes from, or goes to, another site";
    Problem::new(StatusCode::FORBIDDEN, "foreign-site", title).detail(detail)
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Body;

    fn answered(headers: &[(&str, &str)]) -> bool {
        let mut request = Request::builder().uri("/v1/runs");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Body::empty()).unwrap();
        let hosts = Hosts::new(&["Springtide.Internal".to_owned()]);
        addressed(&hosts, &request).is_ok_and(|authority| from_here(&authority, &request).is_ok())
    }

    #[test]
    fn local_names_are_answered() {
        for host in [
            "127.0.0.1:8000",
            "127.1.2.3",
            "[::1]:8000",
            "[::ffff:127.0.0.1]:8000",
            "localhost:8000",
            "LOCALHOST",
            "localhost.:8000",
            "demo.localhost:8000",
            "springtide.internal:8000",
        ] {
            assert!(answered(&[("host", host)]), "{host}");
        }
    }

    #[test]
    fn names_that_a_page_may_point_to_this_machine_are_not_answered() {
        for host in [
            "evil.example:8000",
            "127.0.0.1.evil.example",
            "localhost.evil.example:8000",
            "notlocalhost",
            "10.0.0.7:8000",
            "0.0.0.0:8000",
            "user@evil.example",
        ] {
            assert!(!answered(&[("host", host)]), "{host}");
        }
        assert!(!answered(&[]), "a missing host");
        assert!(
            !answered(&[("host", "127.0.0.1"), ("host", "evil.example")]),
            "two hosts"
        );
    }

    #[test]
    fn requests_of_other_sites_pages_are_not_answered() {
        let host = ("host", "127.0.0.1:8002");
        assert!(answered(&[host, ("origin", "http://127.0.0.1:8002")]));
        assert!(answered(&[host, ("sec-fetch-site", "same-origin")]));
        assert!(answered(&[host, ("sec-fetch-site", "none")]));
        for origin in [
            "https://evil.example",
            "http://127.0.0.1:3000",
            "http://localhost:8002",
            "null",
            "file://",
        ] {
            assert!(!answered(&[host, ("origin", origin)]), "{origin}");
        }
        for site in ["cross-site", "same-site"] {
            assert!(!answered(&[host, ("sec-fetch-site", site)]), "{site}");
            assert!(
                !answered(&[host, ("sec-fetch-site", site), ("sec-fetch-mode", "no-cors")]),
                "{site}"
            );
        }
        let link = [
            host,
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-mode", "navigate"),
            ("sec-fetch-dest", "document"),
        ];
        assert!(answered(&link), "a link to a page of ours");
    }
}
